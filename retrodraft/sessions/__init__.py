"""Calls that remember: sessions, the namespaces that they share, and how they are saved."""
