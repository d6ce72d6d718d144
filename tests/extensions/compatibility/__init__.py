"""Tests of `scale-cpt combinations`."""
