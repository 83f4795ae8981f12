"""The asyncio shells: ingress, tokenize, schedule, detokenize, and the system that supervises them."""
