"""Dion: orthonormal updates of low rank, of which the ranks send the factors alone."""
