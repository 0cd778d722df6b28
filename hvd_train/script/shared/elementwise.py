"""Constants of the test whether a script's optimizer is elementwise: steps on whole tensors and on their parts."""

STEPS = 40  # some formulas differ in their first steps, in every tenth, or after a warm-up
SCALES = (1e-3, 1.0, 1e3)  # of gradients: clipping by a norm shows only with large ones
# Formulas may treat matrices, vectors and kernels differently, and large ones differently from small ones.
SHAPES = ((3, 4), (5,), (2, 2, 3, 1), (130, 136), (20_000,), (3, 3, 40, 50))
