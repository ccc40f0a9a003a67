"""An OpenAI-compatible server whose sessions remember: `retrodraft serve`."""
