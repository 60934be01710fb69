// What client scripts of Node share: as report.py.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

export const HERE = import.meta.dirname;
// of this run alone
export const HOME = process.env.HOME;
export const ANSWER = "It is 21 degrees in Bonn, é 🙂.";
export const THINKING = "I know that.";
export const MODEL = "tiny";
export const ASK = "How warm is it?";
export const ASK_AND_THINK = "Please think: how warm is it?";
export const URL = process.argv[2];
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, degrees: { type: "integer" } },
  required: ["city", "degrees"],
  additionalProperties: false,
};
export const WEATHER = { city: "Bonn", degrees: 21 };

export const same = (found, wanted) => assert.deepEqual(found, wanted);

// What a command prints, a line of JSON for each event.
export function events(command, words, environment) {
  const env = { ...process.env, ...environment };
  const options = { cwd: HOME, encoding: "utf8", env, stdio: ["ignore", "pipe", "pipe"] };
  const lines = execFileSync(command, words, { ...options, timeout: 600_000 }).split("\n");
  return lines.filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
}

export async function run(features) {
  const found = {};
  for (const [name, attempt] of Object.entries(features)) {
    try {
      await attempt();
      found[name] = "";
    } catch (error) {
      found[name] = `${error?.name}: ${error?.message}`.slice(0, 400);
      console.error(error);
    }
  }
  console.log(JSON.stringify(found));
}
