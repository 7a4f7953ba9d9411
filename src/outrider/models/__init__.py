"""Models: what the loop needs of one, the decoder, and how they are found and loaded."""
