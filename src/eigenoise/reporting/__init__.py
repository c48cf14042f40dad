"""What a person sees of results: tables, figures, progress, TensorBoard, an HTML page."""
