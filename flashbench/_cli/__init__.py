"""The commands, one file each. A command parses, calls and shows; it imports its layers when it runs."""
