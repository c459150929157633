import { short, type Phase } from "./api";

export interface Part { text?: string; media?: string | null; common?: boolean }
export interface Message { role: string; parts: Part[] }
/** A group in the list; a score is null if it is no number. */
export interface Listed {
  step: number;
  group: number;
  source: string | null;
  count: number;
  mean: number | null;
  spread: number | null;
  length: number;
  score: (number | null)[];
  truncated: boolean[];
  failed: boolean[];
  hit: boolean[] | null; // null: every answer is found
  question: string;
  media: string | null;
  pictures: number;
  excerpt: string | null;
}
export interface Page { groups: number; answers: number; scale: [number, number] | null; sources: string[]; rows: Listed[] }
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
  speaker: string;
  begin: number;
  end: number;
  reward: number;
  calls: Call[];
  parts: Part[];
}
export interface Answer {
  sample: number;
  prompt_id: string;
  source: string | null;
  prompt: string;
  messages: Message[];
  answer: string;
  ground_truth: string;
  turns: Turn[] | null;
  stop_reason?: string | null;
  length: number; // tokens
  characters: number;
  cut: boolean;
  tokens: number[] | null;
  pieces: string[] | null;
  rollout_logprobs: Numbers;
  old_logprobs: Numbers;
  entropies: Numbers;
  teacher_logprobs?: Numbers;
  advantages: Numbers;
  score: number | null;
  reward: number | null;
  parts: Record<string, number | null>;
  extracted: string | null;
  reason: string | null;
  failure: string | null;
  finish_reason: string | null;
}
export interface Open { run: number; step: number; group: number }
export interface Same extends Open { score: number | null; scores: (number | null)[] }
/** Equal answers, with the places of all in the group. */
export interface Merged { answer: Answer; places: number[]; samples: number[] }
export type Scale = [number, number] | null;

/** The colour of a square: its score between the lowest and the highest. */
export function fill(score: number | null, scale: Scale): string | null {
  if (score === null || !scale) return null;
  const [low, high] = scale;
  const share = high > low ? Math.min(Math.max((score - low) / (high - low), 0), 1) : 1;
  return `color-mix(in oklab, var(--most) ${(share * 100).toFixed(0)}%, var(--least))`;
}

/** Merge answers that say the same with the same result, best first. Forks stay apart. */
export function merge(answers: Answer[]): Merged[] {
  const found = new Map<string, Merged>();
  answers.forEach((answer, place) => {
    const same = JSON.stringify([answer.answer, answer.prompt, answer.score, answer.parts, answer.failure, answer.finish_reason, answer.stop_reason, answer.cut && place,
      (answer.turns ?? []).map((turn) => [turn.role, turn.parts, turn.calls.map((call) => [call.tool, call.arguments, call.error])])]);
    const known = found.get(same);
    if (known) {
      known.places.push(place);
      known.samples.push(answer.sample);
    } else found.set(same, { answer, places: [place], samples: [answer.sample] });
  });
  return [...found.values()].sort((a, b) => (b.answer.score ?? -Infinity) - (a.answer.score ?? -Infinity) || 0);
}

/** Mean and standard deviation of the scores that are numbers. */
export function describe(scores: (number | null)[]): string {
  const known = scores.filter((one): one is number => one !== null);
  if (!known.length) return "–";
  const mean = known.reduce((sum, one) => sum + one, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, one) => sum + (one - mean) ** 2, 0) / known.length);
  return known.length > 1 ? `${rounded(mean)} ± ${rounded(spread)}` : rounded(mean);
}

export const rounded = (value: number | null): string => (value === null ? "–" : Math.abs(value) < 100 && Math.abs(value) >= 0.01 ? String(Number(value.toFixed(2))) : short(value));

/** What tokens can be coloured by. Those with a sign are symmetric around zero. */
export const COLOURS = {
  none: "nothing", advantages: "advantage", entropy: "entropy", surprise: "surprise (−log p)", gap: "engine less learner", teacher: "teacher less learner",
};
export type Colour = keyof typeof COLOURS;
export const SIGNED: Colour[] = ["advantages", "gap", "teacher"];

/** A number a token, null if it is none; [] if the record has none. */
export function numbers(answer: Answer, colour: Colour, phase: Phase): (number | null)[] {
  const less = (one: Numbers | undefined) => (one ?? []).map((value, at) => {
    const other = answer.old_logprobs?.[at];
    return value === null || other === null || other === undefined ? null : value - other;
  });
  if (colour === "gap") return less(answer.rollout_logprobs);
  if (colour === "teacher") return less(answer.teacher_logprobs);
  if (colour === "entropy") return answer.entropies ?? [];
  if (colour === "surprise") return ((phase === "sft" ? answer.old_logprobs : answer.rollout_logprobs) ?? []).map((value) => (value === null ? null : -value));
  return colour === "advantages" ? (answer.advantages ?? []) : [];
}

/** The advantage that all tokens of an answer share; null if they differ, as in distillation, or if there is none. */
export function advantage(answer: Answer): number | null {
  const trained = (answer.advantages ?? []).filter((_, at) => !answer.turns || answer.turns.some((turn) => turn.role === "assistant" && turn.begin <= at && at < turn.end));
  const first = trained[0] ?? null;
  return first !== null && trained.every((one) => one !== null && Math.abs(one - first) < 1e-6) ? first : null;
}

/** What the policy wrote, with what it read between in several turns: the text that answers are compared by. */
export const wording = (answer: Answer): string =>
  answer.turns ? answer.turns.map((turn) => turn.parts.map((part) => part.text ?? "").join("")).join("\n") : answer.answer;
