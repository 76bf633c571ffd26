"""Configuration, plug-ins, run store, errors, text and terminal; imports no other package."""
