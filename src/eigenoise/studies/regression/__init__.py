"""The regression study: UCI tables, many splits at once (section 6.1, Table 1)."""
