"""Checkpoints in the formats of others: Hugging Face's, and torch's distributed checkpoints."""
