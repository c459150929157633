/** Axes: ticks at round numbers, the few points that a screen can show, and labels that do not overlap. */
export interface Axis { low: number; high: number; ticks: number[]; at: (value: number) => number }

/** An axis over values that maps them to 0 … 1; a log axis takes positive values. */
export function axis(values: number[], log: boolean, count: number, pad = 0.06): Axis {
  const place = (value: number) => (log ? Math.log10(value) : value);
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) [low, high] = log ? [0.1, 1] : [0, 1];
  let [from, to] = [place(low), place(high)];
  const flat = !(to - from > Math.abs(to) * 1e-9);
  if (flat) [from, to] = [from - (Math.abs(from) || 1) * 0.05, to + (Math.abs(to) || 1) * 0.05];
  const room = (to - from) * pad;
  [from, to] = [from - room, to + room];
  const span = to - from;
  const ticks = (flat ? [low] : log ? decades(from, to, count) : rounds(from, to, count)).filter((tick) => place(tick) >= from && place(tick) <= to);
  return { low, high, ticks, at: (value) => (place(value) - from) / span };
}

function rounds(from: number, to: number, count: number): number[] {
  const rough = (to - from) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999)! * power;
  const first = Math.ceil(from / step), last = Math.floor(to / step);
  return Array.from({ length: Math.max(0, Math.min(last - first + 1, 20)) }, (_, at) => Number(((first + at) * step).toPrecision(12)));
}

function decades(from: number, to: number, count: number): number[] {
  const every = Math.max(1, Math.ceil((to - from) / count)), found: number[] = [];
  const parts = to - from < 1.5 ? [1, 2, 5] : [1];
  for (let power = Math.floor(from); power <= Math.ceil(to); power += every) for (const part of parts) found.push(part * 10 ** power);
  return found;
}

/** The first, lowest, highest and last point of each slot, if there are more points than `most` can show. */
export function thin<T extends { x: number; y: number }>(points: T[], most: number): T[] {
  if (points.length <= 4 * most) return points;
  const size = points.length / most, kept: T[] = [];
  for (let slot = 0; slot < most; slot++) {
    const part = points.slice(Math.round(slot * size), Math.round((slot + 1) * size));
    const low = part.reduce((a, b) => (b.y < a.y ? b : a)), high = part.reduce((a, b) => (b.y > a.y ? b : a));
    kept.push(...new Set([part[0]!, ...(low.x < high.x ? [low, high] : [high, low]), part.at(-1)!]));
  }
  return kept;
}

/** Move labels apart to at least `gap`, in order, within 0 … `most`. */
export function apart(places: number[], gap: number, most: number): number[] {
  const order = places.map((_, at) => at).sort((a, b) => places[a]! - places[b]!), moved = [...places];
  let floor = 0;
  for (const at of order) floor = (moved[at] = Math.max(places[at]!, floor)) + gap;
  let ceiling = most;
  for (const at of order.reverse()) ceiling = (moved[at] = Math.min(moved[at]!, ceiling)) - gap;
  return moved;
}

/** The index of the step nearest to one; steps ascend. -1 without steps. */
export function nearest(steps: number[], step: number): number {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle]! < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1]! < steps[low]! - step ? low - 1 : steps.length ? low : -1;
}
