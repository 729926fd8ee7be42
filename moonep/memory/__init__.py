"""Symmetric memory: who the peers are (`peers`), memory that all ranks map (`host`), and how they wait (`barrier`)."""
