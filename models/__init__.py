"""Stage 3: draft heads, one file per method, and what they share."""
