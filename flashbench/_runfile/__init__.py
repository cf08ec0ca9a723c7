"""Parts of runfile: lines and their checksums, reading, the writer, the lock of a folder, what verify finds."""
