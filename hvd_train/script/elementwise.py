"""The trial that shows whether an optimizer of a script is elementwise: steps on these tensors, whole and in parts."""

STEPS = 12  # some formulas take another branch in their first steps, or in every tenth
SCALES = (1e-3, 1.0, 1e3)  # of gradients: what clips by a norm shows with large ones alone
SHAPES = ((3, 4), (5,), (2, 2, 3, 1))  # formulas treat matrices, vectors and kernels apart
