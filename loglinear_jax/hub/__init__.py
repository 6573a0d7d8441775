"""Parameters of models that others trained, as ours and back."""
