"""Several processes that train one model: what is averaged between them and what is divided."""
