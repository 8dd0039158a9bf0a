"""The functions and classes that `import offbeat` gives; see `offbeat.__all__`."""
