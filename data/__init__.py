"""Stage 1: prompts, the responses of the target itself, and token rows."""
