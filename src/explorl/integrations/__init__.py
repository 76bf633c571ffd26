"""Explorl's strategies inside other trainers."""
