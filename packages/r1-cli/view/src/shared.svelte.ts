import { ask, type Row, type Run } from "./api";

/** The step that all charts show: of the slider, or of the pointer over one of them; null is the last step. */
export const shown: { slider: number | null; pointer: number | null; readonly step: number | null } = $state({
  slider: null,
  pointer: null,
  get step() { return this.pointer ?? this.slider; },
});

interface Page { rows: Row[]; next: number; times: number }
interface Log { steps: Map<number, Row>; next: number; times: number }

/** The numbers of all runs by step, of which only what is new is asked for. */
export class Logs {
  all: Log[] = $state.raw([]);
  problem = $state("");
  #under = false;

  async read(runs: Run[]) {
    if (this.#under) return;
    this.#under = true;
    try {
      this.all = await Promise.all(runs.map(async (_, run) => {
        const known = this.all[run] ?? { steps: new Map<number, Row>(), next: 0, times: 0 };
        const page = await ask<Page>("curves", { run, after: known.next, times: known.times });
        if (page.times === known.times && page.next === known.next && this.all[run]) return known;
        const steps = new Map(page.times === known.times ? known.steps : []);
        for (const row of page.rows) steps.set(row.step!, { ...steps.get(row.step!), ...row });
        return { steps, next: page.next, times: page.times };
      }));
      this.problem = "";
    } catch (error) {
      this.problem = String(error);
    }
    this.#under = false;
  }
}
