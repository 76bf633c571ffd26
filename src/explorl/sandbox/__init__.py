"""Run untrusted code: programs that a model wrote (`programs`), cells that it runs while it generates (`interpreter`)
and functions that judge its answers (`isolated_call`).

The package does not depend on tasks. docs/security.md describes what it stops.
"""
