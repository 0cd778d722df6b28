"""Every key of a configuration, a file for each section: type, default, meaning, forbidden combinations."""
