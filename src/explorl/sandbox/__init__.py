"""Where code runs that nobody has read: programs that a model wrote (`programs`), and judges of its answers (`sealed`).

It knows nothing of tasks. docs/security.md says what it stops.
"""
