"""Every key of a configuration, a file for each section, with type, default, meaning and forbidden combinations."""
