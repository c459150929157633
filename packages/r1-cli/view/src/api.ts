export const PHASES = { train: "training", validation: "validation", sample: "sampling", sft: "fine-tuning" };
export type Phase = keyof typeof PHASES;
export interface Run extends Record<Phase, number[]> {
  name: string;
  state: "waiting" | "live" | "finished" | "stopped" | "silent";
  told: string;
}
/** How a state of a run is coloured; its word stands beside it. */
export const TONES: Record<Run["state"], string> = { waiting: "", live: "good", finished: "", stopped: "bad", silent: "warn" };
export type Row = Record<string, number | null>;
export interface Light {
  step: number;
  group: number;
  sample: number;
  score: number | null;
  length: number;
  truncated: boolean;
  failed: boolean;
  flat: boolean;
  prompt: string;
  answer: string;
}
type Numbers = (number | null)[] | null;
export interface Call {
  tool: string;
  arguments: string;
  seconds: number;
  error: string;
  truncated: number;
  cause?: string; // which older records lack
}
export interface Turn {
  role: "assistant" | "environment";
  begin: number;
  end: number;
  reward: number;
  calls: Call[];
  parts: { text?: string; media?: string | null }[];
}
export interface Answer {
  sample: number;
  prompt_id: string;
  prompt: string;
  answer: string;
  ground_truth: string;
  prompt_media: string[];
  turns: Turn[] | null;
  stop_reason?: string | null;
  tokens: number[] | null;
  pieces: string[] | null;
  rollout_logprobs: Numbers;
  old_logprobs: Numbers;
  entropies: Numbers;
  ref_logprobs: Numbers;
  teacher_logprobs?: Numbers;
  advantages: Numbers;
  score: number | null;
  reward: number | null;
  parts: Record<string, number | null>;
  extracted: string | null;
  reason: string | null;
  failure: string | null;
  finish_reason: string | null;
  weight_version: number | null;
}
export interface Same {
  run: number;
  step: number;
  group: number;
  score: number | null;
}

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

export function short(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
