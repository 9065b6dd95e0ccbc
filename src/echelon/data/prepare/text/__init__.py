"""Features made of text: tokenisers, the choice of a vocabulary, and encoders."""
