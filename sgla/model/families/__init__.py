"""The table of families, by what an architecture is called in ``config.json``. Loads no torch."""

from sgla.model.families import dense, encoders, gemma, latent, layer_norms, mixtures

FAMILIES = {
    **dense.FAMILIES,
    **gemma.FAMILIES,
    **layer_norms.FAMILIES,
    **latent.FAMILIES,
    **mixtures.FAMILIES,
    **encoders.FAMILIES,
}
