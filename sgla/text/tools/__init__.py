"""What a model writes besides prose: tool calls and reasoning.
``parser.OutputParser`` takes an output apart as it comes."""
