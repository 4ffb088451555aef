"""Typed words, kinds of models and options that several commands share."""
