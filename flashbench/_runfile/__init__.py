"""Parts of runfile: lines and their checksums, the lock of a folder, what verify finds."""
