export const PHASES = { train: "training", validation: "validation", sample: "sampling", sft: "fine-tuning" };
export type Phase = keyof typeof PHASES;
export interface Run extends Record<Phase, number[]> {
  name: string;
  folder: string;
  state: "waiting" | "live" | "finished" | "stopped" | "silent";
  told: string;
}
/** How a state of a run is coloured; its word stands beside it. */
export const TONES: Record<Run["state"], string> = { waiting: "", live: "good", finished: "", stopped: "bad", silent: "warn" };
/** A line of docs/metrics.md: names that match `pattern`, what they mean, and whether to watch them. */
export interface MetricHelp { section: string; place: number; pattern: string; text: string; watch: boolean }
/** A number over steps `from` to `to`; of a validation, with its 95 % interval. */
export interface Measured { value: number; from: number; to: number; low?: number; high?: number }
export interface Gain {
  metric: string;
  label: string;
  better: "up" | "down" | "";
  first: Measured;
  now: Measured;
  best: Measured | null;
  line: [number, number][];
}
export interface Overview {
  step: number;
  total: number | null;
  began: string | null;
  ended: string | null;
  left: number | null;
  model: string;
  algorithm: string;
  rows: { name: string; count: number | null }[];
  gains: Gain[];
  findings: { what: string; evidence: string; advised: string }[];
  records: number;
  facts: [string, string][];
}
/** A process of a run that goes on: sizes in bytes, times in seconds, its longest phases first. */
export interface Process {
  name: string;
  host: string;
  pid: number;
  state: string;
  memory: number;
  device_memory: number | null;
  tokens: number;
  phases: [string, number][];
  heard: number;
  restarts: number;
}
/** `restarts`: at which step, and the cause with what was lost. */
export interface ProcessTable { processes: Process[]; restarts: [string, string][] }
/** What differs between the runs: a row of values, one a run, by section. */
export type Differences = Record<string, { name: string; values: string[] }[]>;
export type Row = Record<string, number | null>;
/** Ask the server; throws with its words. */
export async function ask<T>(name: string, asked: Record<string, string | number> = {}): Promise<T> {
  const words = new URLSearchParams(Object.entries(asked).map(([key, value]) => [key, String(value)]));
  const response = await fetch(`/api/${name}?${words}`);
  if (response.headers.get("content-type")?.includes("json")) {
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    return found as T;
  }
  throw new Error(await response.text());
}

/** The classes of a run's line: eight colours and eight dashes, paired anew after each eight runs. */
export const colour = (run: number): string => `run${run % 8} dash${(run + Math.floor(run / 8)) % 8}`;

/** At most three significant digits, for what is read at a glance. */
export const brief = (value: number | null | undefined): string => short(typeof value === "number" && Math.abs(value) < 1000 ? Number(value.toPrecision(3)) : value);

export function short(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

/** Seconds in words: 48 s, 12 min, 3 h 05 min, 2 d 4 h. */
export function time(seconds: number): string {
  if (seconds < 9.95) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 99.5) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60), hours = Math.floor(minutes / 60);
  if (hours < 1) return `${minutes} min`;
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
