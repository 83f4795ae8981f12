"""The table of families, by what an architecture is called in ``config.json``. Loads no torch."""

from sgla.model.families import alibi, dense, encoders, gemma, hybrids, latent, layer_norms, mamba, mixtures

FAMILIES = {
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **layer_norms.FAMILIES,
    **alibi.FAMILIES,
    **latent.FAMILIES,
    **mixtures.FAMILIES,
    **hybrids.FAMILIES,
    **mamba.FAMILIES,
    **encoders.FAMILIES,
}
