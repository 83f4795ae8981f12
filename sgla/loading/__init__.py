"""The files of a model on this disk, and their weights on the way into its layers."""
