"""Which knobs decided how high a configuration came: PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023).

It asks of each knob how differently its values are spread among the best tenth of the trials and among all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import FrozenTrial, create_trial

from servekit.tuner.space import Integers, Knob, Ladder, Options, Reals, Space
from servekit.tuner.study import Trial, to_param
from servekit.tuner.trial import Ending

FEWEST_TRIALS = 30
"""Below which the best tenth is too few trials to compare with the rest."""
_FEASIBLE = "feasible"


def knob_importance(space: Space, trials: Sequence[Trial]) -> Mapping[str, float] | None:
    """Each knob's share of the importance, the largest first; they sum to 1. None: too few trials, or all alike.

    Trials that were screened out or measured badly say nothing and are left out; so are repeats. An infeasible one
    counts as a rate of 0: Optuna's evaluator itself knows no constraints, and takes smaller values for better.
    """
    said = [trial for trial in trials if trial.repeats is None
            and trial.ending not in (Ending.screened_out, Ending.invalid, Ending.abandoned)]
    if len(said) < FEWEST_TRIALS or not space.knobs:
        return None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize")
    study.add_trials([_frozen(space, trial) for trial in said])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shares = PedAnovaImportanceEvaluator().evaluate(study, target=_badness)
    total = sum(shares.values())
    if total <= 0:
        return None
    return {key: shares[key] / total for key in sorted(shares, key=lambda key: -shares[key])}


def _frozen(space: Space, trial: Trial) -> FrozenTrial:
    """A trial in Optuna's terms, with every knob: one that does not matter has the value that it starts from."""
    values = {knob.key: trial.values.get(knob.key, space.start[knob.key]) for knob in space.knobs}
    return create_trial(params={knob.key: to_param(knob, values[knob.key]) for knob in space.knobs},
                        distributions={knob.key: _distribution(knob) for knob in space.knobs},
                        value=trial.rate_per_s, user_attrs={_FEASIBLE: trial.is_feasible})


def _distribution(knob: Knob) -> BaseDistribution:
    match knob.domain:
        case Options(values):
            return CategoricalDistribution(values)
        case Ladder(values):
            return IntDistribution(0, len(values) - 1)
        case Integers(low, high, is_log):
            return IntDistribution(low, high, log=is_log)
        case Reals(low, high, is_log):
            return FloatDistribution(low, high, log=is_log)


def _badness(trial: FrozenTrial) -> float:
    assert trial.value is not None
    return -trial.value if trial.user_attrs[_FEASIBLE] else 0.0
