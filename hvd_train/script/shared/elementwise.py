"""Constants of the test whether a script's optimizer is elementwise: steps on whole tensors and on their parts."""

STEPS = 12  # some formulas differ in their first steps, or in every tenth
SCALES = (1e-3, 1.0, 1e3)  # of gradients: clipping by a norm shows only with large ones
SHAPES = ((3, 4), (5,), (2, 2, 3, 1))  # formulas may treat matrices, vectors and kernels differently
