"""Families that take pictures: what stands for one in their prompts. Their towers are modules of transformers
(``loading/tower.py``), their language models families like others."""
