"""The largest sizes that are taken for a model's and not for a broken file's."""

LAYERS, WIDTH, INNER, HEADS, HEAD_DIM = 1024, 1 << 17, 1 << 20, 4096, 4096
VOCAB, EXPERTS, POSITIONS = 1 << 24, 1 << 14, 1 << 31
UNBOUNDED = 1 << 20  # tokens of a context, where nothing depends on positions
