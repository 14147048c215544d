"""Linear algebra on stacks of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from rules.samples.calls import call, plain, unsplit, x

aten = torch.ops.aten


def spd(*batch: int) -> Tensor:
    """Symmetric positive definite 3 x 3, differentiable."""
    root = plain(x(*batch, 3, 3))
    return (root @ root.mT + 3 * torch.eye(3, dtype=torch.float64)).requires_grad_()


def spread(*batch: int) -> Tensor:
    """3 x 3 with a determinant above 0 and singular values that are apart, differentiable."""
    return (plain(x(*batch, 3, 3)) * 0.3 + torch.diag(torch.arange(1.0, 4, dtype=torch.float64))).requires_grad_()


LU, PIVOTS = torch.linalg.lu_factor(plain(spread(2)))
LD, LD_PIVOTS = torch.linalg.ldl_factor(plain(spd(2)))
REFLECTORS, TAU = torch.geqrf(plain(x(2, 4, 3)))
ONE_LU = torch.linalg.lu_factor(plain(spread()))

LINALG = [
    *(call(op, spd(2)) for op in (aten.cholesky.default, aten.linalg_cholesky.default, aten.cholesky_inverse.default)),
    *(call(op, spd(2, 2)) for op in (aten.linalg_cholesky_ex.default, aten.logdet.default)),
    unsplit(aten.linalg_cholesky.default, spd(), upper=True),
    call(aten.cholesky_solve.default, x(2, 3, 2), spd(2)),
    call(aten.geqrf.default, plain(x(2, 4, 3))),
    *(
        call(op, spread(2, 1))
        for op in (
            *(aten.inverse.default, aten.linalg_inv.default, aten.linalg_inv_ex.default, aten.pinverse.default),
            *(aten.det.default, aten.linalg_det.default, aten.linalg_slogdet.default, aten.slogdet.default),
            *(aten.linalg_eigh.default, aten.linalg_eigvals.default, aten.linalg_eigvalsh.default),
            *(aten.linalg_svd.default, aten.linalg_svdvals.default, aten.svd.default),
            *(aten.linalg_qr.default, aten.qr.default, aten.linalg_lu.default, aten.linalg_lu_factor.default),
            *(aten.linalg_lu_factor_ex.default, aten._lu_with_info.default),
            *(aten.linalg_matrix_exp.default, aten.matrix_exp.default),
        )
    ),
    call(aten.linalg_eig.default, plain(spread(3))),
    call(aten.linalg_cond.default, x(2, 3, 3)),
    call(aten.linalg_cond.default, plain(x(2, 3, 3)), 1),
    call(aten.linalg_cond.p_str, plain(x(2, 3, 3)), "fro"),
    call(aten.linalg_qr.default, plain(x(2, 4, 3)), "r"),
    call(aten.linalg_qr.default, x(2, 4, 3)),
    call(aten.linalg_svd.default, x(2, 4, 3), False),
    *(call(op, REFLECTORS, TAU) for op in (aten.linalg_householder_product.default, aten.orgqr.default)),
    call(aten.ormqr.default, REFLECTORS, TAU, plain(x(2, 4, 2))),
    call(aten.linalg_ldl_factor.default, plain(spd(2))),
    call(aten.linalg_ldl_factor_ex.default, plain(spd(2))),
    call(aten.linalg_ldl_solve.default, LD, LD_PIVOTS, plain(x(2, 3, 2))),
    call(aten.linalg_lu_solve.default, LU, PIVOTS, x(2, 3, 2)),
    call(aten.linalg_lu_solve.default, *ONE_LU, x(2, 3, 2)),
    call(aten.lu_solve.default, x(2, 3, 2), LU, PIVOTS),
    call(aten.lu_unpack.default, LU, PIVOTS),
    call(aten.linalg_matrix_power.default, spread(2), 3),
    call(aten.matrix_power.default, spread(2), -2),
    call(aten.linalg_matrix_rank.default, plain(x(2, 3, 3)), 0.5),
    call(aten.linalg_matrix_rank.tol_tensor, plain(x(2, 3, 3)), plain(x(2))),
    call(aten.linalg_matrix_rank.atol_rtol_float, plain(x(2, 3, 3)), atol=0.1),
    call(aten.linalg_matrix_rank.atol_rtol_tensor, plain(x(2, 3, 3)), atol=plain(x(2)).abs(), rtol=plain(x()).abs()),
    call(aten.linalg_pinv.default, spread(2, 1), 1e-9),
    call(aten.linalg_pinv.atol_rtol_float, x(2, 4, 3), atol=0.01),
    call(aten.linalg_pinv.atol_rtol_tensor, x(2, 4, 3), atol=plain(x(2)).abs() * 0.01),
    call(aten.linalg_pinv.rcond_tensor, x(2, 4, 3), plain(x(2)).abs() * 0.01),
    call(aten.linalg_solve.default, spread(2), x(2, 3, 2)),
    call(aten.linalg_solve.default, spread(2, 3), x(2, 3, 3)),
    call(aten.linalg_solve.default, spread(2, 1), x(3, 3, 2)),
    call(aten.linalg_solve.default, spread(2), x(3)),
    call(aten.linalg_solve.default, spread(2), x(2, 2, 3), left=False),
    call(aten.linalg_solve_ex.default, spread(2), x(2, 3, 2)),
    call(aten.linalg_solve_triangular.default, spread(2, 1), x(3, 3, 2), upper=True),
    call(aten.triangular_solve.default, x(2, 3, 2), spread(2)),
    call(aten.linalg_cross.default, x(2, 3, 4), x(2, 3, 1), dim=1),
    call(aten.linalg_cross.default, x(2, 4, 3), x(1, 4, 3)),
]
