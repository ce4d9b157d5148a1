// The official `openai` package of npm against a router: node try_node.mjs BASE_URL CASE. The last line of output is JSON.
import OpenAI from 'openai';

const [baseURL, name] = process.argv.slice(2);
const model = process.env.CLIENT_MODEL ?? 'sim';
const client = new OpenAI({ baseURL, apiKey: 'x', timeout: 30000 });
const hello = [{ role: 'user', content: 'Say hello.' }];
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    parameters: { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] },
  },
};
const told = (error) => ({
  raised: error.constructor.name,
  status: error.status ?? null,
  code: error.code ?? null,
  type: error.type ?? null,
  param: error.param ?? null,
});

async function attempt(action) {
  try {
    return { answer: await action() };
  } catch (error) {
    return told(error);
  }
}

async function streamed(body, options) {
  let text = '';
  let finish = null;
  let usage = null;
  const events = await client.chat.completions.create({ model, messages: hello, ...body, stream: true }, options);
  for await (const event of events) {
    text += event.choices[0]?.delta?.content ?? '';
    finish = event.choices[0]?.finish_reason ?? finish;
    usage = event.usage ?? usage;
  }
  return { text, finish, usage };
}

const cases = {
  async answers() {
    const whole = await client.chat.completions.create({ model, messages: hello });
    const text = await client.completions.create({ model, prompt: 'x', max_tokens: 4 });
    const called = await client.chat.completions.create({
      model,
      messages: [{ role: 'user', content: 'What is the weather in Paris?' }],
      tools: [weather],
    });
    const runner = client.chat.completions.stream({
      model,
      messages: [{ role: 'user', content: 'What is the weather in Paris?' }],
      tools: [weather],
    });
    const final = await runner.finalChatCompletion();
    const logprobs = await client.chat.completions.create({ model, messages: hello, logprobs: true, top_logprobs: 1 });
    return {
      whole: whole.choices[0].message.content,
      request_id: whole._request_id,
      usage: whole.usage,
      text: text.choices[0].text.length,
      called: called.choices[0],
      streamed_call: final.choices[0].message.tool_calls,
      logprobs: logprobs.choices[0].logprobs.content.length,
      streamed: await streamed({ stream_options: { include_usage: true } }),
      models: (await client.models.list()).data.map((model) => model.id),
    };
  },
  async errors() {
    return {
      model: await attempt(() => client.chat.completions.create({ model: 'zz', messages: hello })),
      width: await attempt(() => client.chat.completions.create({ model, messages: hello, n: 2 })),
      engine: await attempt(() => client.completions.create({ model, prompt: 'x', max_tokens: 1e7 })),
    };
  },
  expired: () => attempt(() => streamed({}, { headers: { 'x-request-timeout': '0.3' } })),
  whole: () => attempt(async () => (await client.chat.completions.create({ model, messages: hello })).choices[0].message.content),
  stream: () => attempt(() => streamed({})),
  async leave() {
    const events = await client.completions.create({ model, prompt: 'x', max_tokens: 5000, ignore_eos: true, stream: true });
    for await (const event of events) break;
    return {};
  },
};

console.log(JSON.stringify(await cases[name]()));
