"""`retrodraft replay`: recorded answers through the strategies, without a model."""
