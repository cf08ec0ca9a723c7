"""Parts of runfile: lines and their checksums, reader, writer, the lock of a folder, what verify finds."""
