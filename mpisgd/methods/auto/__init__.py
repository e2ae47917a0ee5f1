"""The compressor that pays on this link, chosen by a trial."""
