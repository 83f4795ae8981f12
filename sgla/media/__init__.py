"""Pictures in prompts: what they are, and the processes in which they are decoded and prepared."""
