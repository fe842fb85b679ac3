"""rapidkda: Kimi Delta Attention for serving."""
