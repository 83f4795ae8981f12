"""Output that has to fit a grammar: compiled before admission, matched beside the sampler."""
