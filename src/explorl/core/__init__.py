"""What every other package stands on and that stands on none of them: looking up plug-ins."""
