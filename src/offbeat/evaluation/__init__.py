"""Results of evaluations: answers and their scores, intervals, files, and the paired comparison of two models. Torch-free."""
