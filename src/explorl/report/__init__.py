"""Figures and one self-contained HTML page."""
