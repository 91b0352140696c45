"""Is the load unbalanced beyond chance, would other splits or maps help, and is that worth what it costs?

Pure: evidence, placement and prices in, an assessment out. The gain of a migration:

    The experts take a share f of step time S, as long as the most loaded rank of each layer needs. With h_l the highest
    cost over capacity of layer l, a token there takes f S / sum_l h_l. Highest ranks of h'_l instead save

        gain_s = f S (1 - sum_l h'_l / sum_l h_l)

    with S the step time over the horizon. h and h' are those of both maps under their best splits, on windows that the
    plan was not made on. The random imbalance of single steps comes on top of both and is left out.

Axes: L layers, E logical experts, P places, R ranks.
"""

from dataclasses import dataclass, replace

import numpy as np

from moeserve_placement.arrays import BoolArray, FloatArray, IntArray
from moeserve_placement.cluster import Cluster
from moeserve_placement.constraints import Constraints
from moeserve_placement.controller.decision import LoadSummary, PhaseLoad, Prediction
from moeserve_placement.controller.evidence import Evidence, Interval
from moeserve_placement.controller.price import MigrationPrice
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.cost import balancedness, mean_level
from moeserve_placement.incoming import fits
from moeserve_placement.moves import Moves
from moeserve_placement.noise_floor import noise_ceiling, noise_floor
from moeserve_placement.objective import Objective
from moeserve_placement.placement import ExpertPlacement, PlacementError
from moeserve_placement.planner import Plan, plan
from moeserve_placement.settings import PlanSettings, Policy
from moeserve_placement.split import CLOSE, even_tokens, shares, tokens_in_force

LEAST_SPLIT_GAIN = 0.002
"""A split that brings the highest ranks down by less is not worth rewriting the tables of all ranks."""
RULES_ONLY = 1e-9
"""A goal that every map meets: the planner then does what the rules demand and no more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InForce:
    """A placement with the split its replicas share by."""

    placement: ExpertPlacement
    split_LP: FloatArray

    @staticmethod
    def evenly(placement: ExpertPlacement) -> "InForce":
        """Replicas share evenly, as ranks do when they start."""
        ones_LE = np.ones((placement.num_layers, placement.num_logical_experts))
        return InForce(placement=placement, split_LP=even_tokens(placement.physical_to_logical_LP, ones_LE))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A migration that could be made."""

    target: InForce
    moves: Moves
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict:
    """Whether to make it, in plain words; `candidate` is None where there is nothing to make."""

    worth: bool
    reason: str
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balance:
    """A load under the placement in force."""

    summary: LoadSummary
    below_L: BoolArray
    """Layers whose best split is still below what chance explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessor:
    """What the judgements have in common. Stateless but for the values it is given."""

    cluster: Cluster
    plan_settings: PlanSettings
    settings: ControllerSettings

    def balance(self, interval: Interval, in_force: InForce) -> Balance:
        """The load of an interval, by layer and as a summary."""
        load_LE, objective = interval.load_LE, self._objective(interval)
        table_LP = in_force.placement.physical_to_logical_LP
        before_LP = tokens_in_force(table_LP, load_LE, in_force.split_LP)
        resplit_LP = objective.lower(objective.tokens(table_LP, load_LE, before_LP, effort=CLOSE), before_LP)
        before_L, resplit_L = (self._balancedness(tokens_LP, objective) for tokens_LP in (before_LP, resplit_LP))
        assignments, trigger = self._chance(load_LE)
        below_L: BoolArray = resplit_L < trigger
        phases = {
            window.phase: PhaseLoad(
                num_tokens=window.num_tokens,
                balancedness=float(
                    self._balancedness(
                        tokens_in_force(table_LP, window.expert_load_LE, in_force.split_LP), objective
                    ).mean()
                ),
            )
            for window in interval.windows
        }
        summary = LoadSummary(
            duration_s=interval.duration_s,
            num_steps=interval.steps.num_steps,
            num_tokens=interval.steps.num_tokens,
            step_s_per_token=interval.step_s_per_token,
            assignments_per_rank=assignments,
            phases=phases,
            balancedness_mean=float(before_L.mean()),
            balancedness_worst=float(before_L.min()),
            resplit_mean=float(resplit_L.mean()),
            resplit_worst=float(resplit_L.min()),
            worst_layer=int(resplit_L.argmin()),
            floor=noise_floor(assignments, self.cluster.num_ranks),
            trigger=trigger,
            num_layers_below=int(below_L.sum()),
        )
        return Balance(summary=summary, below_L=below_L)

    def better_split(self, interval: Interval, in_force: InForce) -> FloatArray | None:
        """A split [L, P] for the map in force that helps beyond chance; None where none does."""
        if self.plan_settings.split == "even":
            return None
        load_LE, objective = interval.load_LE, self._objective(interval)
        table_LP = in_force.placement.physical_to_logical_LP
        before_LP = tokens_in_force(table_LP, load_LE, in_force.split_LP)
        _, trigger = self._chance(load_LE)
        rows = np.flatnonzero(self._balancedness(before_LP, objective) < trigger)
        if not rows.size:
            return None
        after_LP = objective.tokens(table_LP[rows], load_LE[rows], before_LP[rows], effort=CLOSE)
        after_LP = objective.lower(after_LP, before_LP[rows])
        highest_L = objective.level_LR(before_LP).max(axis=1)
        gain = float((highest_L[rows] - objective.level_LR(after_LP).max(axis=1)).sum())
        if gain < LEAST_SPLIT_GAIN * highest_L.sum():
            return None
        split_LP = in_force.split_LP.copy()
        split_LP[rows] = shares(table_LP[rows], after_LP, load_LE[rows])
        return split_LP

    def saved_share(self, before: ExpertPlacement, after: ExpertPlacement, interval: Interval) -> FloatArray:
        """Share [L] of step time that each layer saves with the map `after`; negative where it loses."""
        load_LE, objective = interval.load_LE, self._objective(interval)
        before_LP, after_LP = before.physical_to_logical_LP, after.physical_to_logical_LP
        changed = np.flatnonzero((before_LP != after_LP).any(axis=1))
        before_L = _highest(before_LP, load_LE, objective)
        saved_L = np.zeros(before_L.size)
        saved_L[changed] = before_L[changed] - _highest(after_LP[changed], load_LE[changed], objective)
        share: FloatArray = self.expert_share(interval) * saved_L / max(float(before_L.sum()), 1e-300)
        return share

    def migration(
        self, evidence: Evidence, in_force: InForce, balance: Balance, price: MigrationPrice, budget_bytes: int
    ) -> Verdict:
        """Plan for the layers below the trigger on the newest windows, judge on the earlier ones.

        Raises PlacementError where the rules need more than the budget.
        """
        seen = balance.summary
        if not seen.assignments_per_rank:
            return Verdict(worth=False, reason="no load")
        if not balance.below_L.any():
            words = f"the worst layer's balancedness is {seen.resplit_worst:.4f}"
            return Verdict(worth=False, reason=f"{words}; chance alone explains down to {seen.trigger:.4f}")
        newest, earlier = evidence.newest(), evidence.earlier()
        assert newest is not None
        assert earlier is not None
        # A layer without load is left alone by the planner, unless a rule demands a move.
        masked_LE = np.where(balance.below_L[:, None], newest.load_LE, 0.0)
        settings = replace(self._with_steps(newest), budget_bytes=budget_bytes)
        current = in_force.placement
        result = plan(masked_LE, current, self.cluster, settings, current_split_LP=in_force.split_LP)
        if not len(result.moves):
            return Verdict(worth=False, reason="no map within the byte budget is better")
        saved_L = self.saved_share(current, result.placement, earlier)
        num_moves_L = np.bincount(result.moves.layer_M, minlength=current.num_layers)
        cost_s = price.cost_s(result.moves, self.cluster)
        gain_s_L = saved_L * earlier.busy_share * self.settings.horizon_s
        pays_L = gain_s_L > self.settings.hysteresis * cost_s * num_moves_L / num_moves_L.sum()
        chosen_L = pays_L & (num_moves_L > 0)
        if not chosen_L.any():
            chosen_L = num_moves_L > 0
        candidate = self._candidate(result, in_force, chosen_L, self._gain(saved_L, chosen_L, earlier), price)
        worth, reason = self._worth(candidate.prediction)
        if evidence.num_missing:
            worth, reason = False, f"load windows still needed: {evidence.num_missing}"
        return Verdict(worth=worth, reason=reason, candidate=candidate)

    def by_rules(
        self, evidence: Evidence, in_force: InForce, price: MigrationPrice, budget_bytes: int
    ) -> Candidate | None:
        """The moves that pins, spread and groups demand; None where they hold already.

        Raises PlacementError where the budget does not pay for them.
        """
        newest = evidence.newest()
        assert newest is not None
        settings = replace(self._with_steps(newest), budget_bytes=budget_bytes, goal=RULES_ONLY)
        current = in_force.placement
        result = plan(newest.load_LE, current, self.cluster, settings, current_split_LP=in_force.split_LP)
        if not len(result.moves):
            return None
        moved_L: BoolArray = np.bincount(result.moves.layer_M, minlength=current.num_layers) > 0
        gain = self._gain(self.saved_share(current, result.placement, newest), moved_L, newest)
        return self._candidate(result, in_force, moved_L, gain, price)

    def by_policy(self, policy: Policy, evidence: Evidence, in_force: InForce, price: MigrationPrice) -> Verdict:
        """What another policy would make of the newest windows, all of it or nothing; judged on the earlier ones.

        Raises PlacementError where it does not keep to the rules, or changes more at once than there is room for.
        """
        if self.plan_settings.constraints != Constraints():
            raise PlacementError(f"policy {policy} keeps to no pins, spread or groups: take them back first")
        newest, earlier = evidence.newest(), evidence.earlier()
        assert newest is not None
        assert earlier is not None
        settings = replace(self._with_steps(newest), policy=policy)
        current, most = in_force.placement, settings.max_incoming_per_layer_rank
        result = plan(newest.load_LE, current, self.cluster, settings, current_split_LP=in_force.split_LP)
        if not len(result.moves):
            return Verdict(worth=False, reason=f"{policy} plans the map in force")
        before_LP, after_LP = current.physical_to_logical_LP, result.placement.physical_to_logical_LP
        if not fits(before_LP, after_LP, self.cluster, most).all():
            raise PlacementError(f"policy {policy} changes more than {most} places of a rank in a layer at once")
        moved_L: BoolArray = np.bincount(result.moves.layer_M, minlength=current.num_layers) > 0
        gain = self._gain(self.saved_share(current, result.placement, earlier), moved_L, earlier)
        candidate = self._candidate(result, in_force, moved_L, gain, price)
        worth, reason = self._worth(candidate.prediction)
        return Verdict(worth=worth, reason=reason, candidate=candidate)

    def expert_share(self, interval: Interval) -> float:
        """Share of step time that the experts take, as measured or else as configured."""
        measured = interval.steps.expert_share
        return self.settings.expert_share if measured is None else measured

    def noise_share(self, interval: Interval) -> float:
        """Share of step time by which chance alone moves a gain measured over the interval."""
        assignments, _ = self._chance(interval.load_LE)
        return self.expert_share(interval) * (1.0 - noise_floor(assignments, self.cluster.num_ranks))

    def _gain(self, saved_L: FloatArray, chosen_L: BoolArray, interval: Interval) -> tuple[float, float]:
        """Share of step time that the layers save, and seconds over the horizon."""
        share = float(saved_L[chosen_L].sum())
        return share, share * interval.busy_share * self.settings.horizon_s

    def _candidate(
        self, result: Plan, in_force: InForce, chosen_L: BoolArray, gain: tuple[float, float], price: MigrationPrice
    ) -> Candidate:
        """The chosen layers of a plan; layers are independent, so any of them make a valid map."""
        current, chosen_L1 = in_force.placement, chosen_L[:, None]
        table_LP = np.where(chosen_L1, result.placement.physical_to_logical_LP, current.physical_to_logical_LP)
        moves = result.moves.select(chosen_L[result.moves.layer_M])
        return Candidate(
            target=InForce(
                placement=replace(current, physical_to_logical_LP=table_LP),
                split_LP=np.where(chosen_L1, result.split_LP, in_force.split_LP),
            ),
            moves=moves,
            prediction=Prediction(
                num_moves=len(moves),
                num_layers=int(chosen_L.sum()),
                num_bytes=moves.num_bytes,
                copy_s=price.copy_s(moves, self.cluster),
                cost_s=price.cost_s(moves, self.cluster),
                gain_share=gain[0],
                gain_s=gain[1],
            ),
        )

    def _worth(self, prediction: Prediction) -> tuple[bool, str]:
        gain = f"{prediction.gain_share:.2%} of step time"
        if prediction.gain_share <= 0.0:
            return False, f"the skew has yet to last: over the windows before, the plan gains {gain}"
        if prediction.gain_share < self.settings.least_gain:
            return False, f"a gain of {gain} is below the least of {self.settings.least_gain:.2%}"
        price = (
            f"{prediction.gain_s:.3g} s of step time in {self.settings.horizon_s:g} s against the "
            f"{prediction.cost_s:.3g} s that {prediction.num_moves} moves cost"
        )
        if prediction.gain_s <= self.settings.hysteresis * prediction.cost_s:
            return False, f"does not pay {self.settings.hysteresis:g} times over: {price}"
        return True, f"gains {gain}: {price}"

    def _balancedness(self, tokens_LP: FloatArray, objective: Objective) -> FloatArray:
        return balancedness(objective.level_LR(tokens_LP) * self.cluster.capacity_R, self.cluster)

    def _chance(self, load_LE: FloatArray) -> tuple[float, float]:
        """Assignments of a layer per rank, and the balancedness that chance alone does not go below."""
        assignments = float(mean_level(load_LE.sum(axis=1), self.cluster).mean() * self.cluster.capacity_R.mean())
        false_alarm = self.settings.false_alarm / len(load_LE)
        return assignments, 1.0 / noise_ceiling(assignments, self.cluster.num_ranks, false_alarm)

    def _objective(self, interval: Interval) -> Objective:
        return Objective.of(self.cluster, self._with_steps(interval))

    def _with_steps(self, interval: Interval) -> PlanSettings:
        """The plan settings with the steps of the interval: reading weights costs once a step."""
        cost = replace(self.plan_settings.cost, num_steps=max(interval.steps.num_steps, 1))
        return replace(self.plan_settings, cost=cost)


def _highest(table_LP: IntArray, load_LE: FloatArray, objective: Objective) -> FloatArray:
    """Cost over capacity of each layer's most loaded rank under the map's best split."""
    highest_L: FloatArray = objective.level_LR(objective.tokens(table_LP, load_LE, effort=CLOSE)).max(axis=1)
    return highest_L
