"""Tables from files: read them, learn from them, keep what was learned in one file, predict."""
