"""Published methods in the same engine: what the product is measured against."""
