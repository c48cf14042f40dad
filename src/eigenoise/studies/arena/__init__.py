"""The arena: how good methods predict after equal CPU time, ours at their defaults, others tuned on validation data."""
